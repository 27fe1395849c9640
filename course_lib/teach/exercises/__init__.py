"""One file per lesson: `lesson_01.py` holds the exercises of `notebooks/01_*.ipynb`."""
