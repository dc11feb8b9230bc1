"""What `pdserve status`, `top`, `drain` and `disagg` share: whom they ask, and what they show."""
