"""What every node runs on: tasks, actors, supervision, members, topics, the node itself."""
