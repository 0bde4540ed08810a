"""The programs people run: training, generation, the demo."""
