"""What a run will take, forecast from rates: no Ray, no model weights and no videos; runs and pages hand those in."""
