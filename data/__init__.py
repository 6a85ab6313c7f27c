"""Files to tensors: discovery and checking, transforms, step-addressed batches, phantoms."""
