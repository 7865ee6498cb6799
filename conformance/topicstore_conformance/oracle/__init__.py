"""What is right, and the means to find out: the model, histories, kills, races, comparisons."""
