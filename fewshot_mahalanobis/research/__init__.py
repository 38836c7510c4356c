"""What researchers need: image sets, episodes, training, evaluation and the methods to compare with."""
