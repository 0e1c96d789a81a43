"""One file per public collective.

Arguments that several collectives share:

axis_name: mesh axis, or tuple of axes, outermost first. Several axes declare a hierarchy: the innermost axis stays
  inside a node.
axis_index_groups: groups as lists of ranks, all of one size; None means one group of all ranks.
algorithm: a name from ``jaxcomm.algorithms(op)``, or "xla" for XLA's own collective. all_to_all, all_gather, psum,
  pmean, pmax, pmin, psum_scatter and pbroadcast also accept "xla_hierarchical", for XLA's own collectives inside nodes
  and between them. None lets the selection table choose.
max_sms: on GPUs, the most multiprocessors that the call occupies, with one thread block each. The value must be equal
  on all ranks. None means JAXCOMM_MAX_SMS, which is an upper limit in any case. On the smallest GPU of the group, up to
  44 multiprocessors stay free for other kernels. No effect on CPUs.
"""
