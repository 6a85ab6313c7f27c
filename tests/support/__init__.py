"""What tests of several rooms share: a tiny config, and commands that start fast."""
