"""What describes a cluster, a `ray up` file or Kubernetes manifests, checked before it costs.

A file becomes what the rules look at (facts.py): by vm.py for `ray up`, with what Ray itself says
of it (launcher.py), by kuberay.py for manifests. A rule is a pure function of these (rules/), and
check.py puts all together.
"""
