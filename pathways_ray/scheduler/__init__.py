"""The scheduler of one island: one total order of gangs for all its devices."""
