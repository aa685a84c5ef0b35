"""The process that writes the lake: one round after another, requests, housekeeping."""
