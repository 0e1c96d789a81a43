"""One file per public collective.

Arguments that all of them share:

axis_name: mesh axis, or tuple of axes, outermost first. Several axes declare a hierarchy: the innermost one stays
  inside a node.
axis_index_groups: lists of ranks of equal size that form the groups; None means one group of all.
algorithm: a name from ``jaxcomm.algorithms(op)``, or "xla" for XLA's own collective; None lets the selection table
  choose.
max_sms: on GPUs, the most multiprocessors that the call keeps busy, a thread block each; the same on all ranks. None
  means JAXCOMM_MAX_SMS, which is the limit in any case. No effect on CPUs.
"""
