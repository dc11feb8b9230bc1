"""The torch engine on an accelerator, beside what that accelerator can do; see `run.sh`."""
