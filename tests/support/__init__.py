"""What several development commands share: campaigns, commands that start fast, tiny configs and data sets."""
