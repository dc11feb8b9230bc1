"""What stands between the planner's decisions and the cluster: views of it, and orders to it."""
