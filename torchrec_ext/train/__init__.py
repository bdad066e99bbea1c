"""The train command: configuration, data, model, loop and report."""
