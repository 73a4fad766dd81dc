"""The version of the distribution, read by the build and sent in the User-Agent header."""

__version__ = "0.1.0"
