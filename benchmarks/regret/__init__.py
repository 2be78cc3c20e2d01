"""What the plan of a call costs: the time of the chosen kernels over that of the best there are."""
