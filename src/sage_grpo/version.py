"""The version of the package, and where its files are: for those who must not import what stands above them."""

from pathlib import Path

__version__ = "0.1.0"
ROOT = Path(__file__).parent
"""The folder of the package."""
