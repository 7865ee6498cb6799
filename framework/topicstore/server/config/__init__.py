"""The settings of a server: their classes and units, reading them from files and the environment, and showing them."""
