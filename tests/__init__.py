"""A package, so that test files of the same name in different folders do not clash."""
