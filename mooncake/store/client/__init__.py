"""The client of the store: both faces, its operations, and what it holds between calls."""
