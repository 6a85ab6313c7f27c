"""What this machine measures, beside what was predicted: memory of real steps."""
