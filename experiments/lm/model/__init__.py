"""The model, its loss and optimiser, and how they are split over devices."""
