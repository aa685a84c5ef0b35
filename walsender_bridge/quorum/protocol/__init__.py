"""What a proposer and a safekeeper share: messages, their bytes, histories, memberships."""
