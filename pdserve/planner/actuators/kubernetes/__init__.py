"""Workers as pods of Deployments of Kubernetes."""

from pdserve.planner.actuators.kubernetes.config import KubernetesConfig, read_config
from pdserve.planner.actuators.kubernetes.deployments import Deployments

__all__ = ["Deployments", "KubernetesConfig", "read_config"]
