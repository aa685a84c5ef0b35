SET ROLE {role};
