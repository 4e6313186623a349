"""Errors, addressed seeds and atomic files: the standard library only, importable from every room."""
