"""The global prefix index: which instance and which tier holds which block."""
