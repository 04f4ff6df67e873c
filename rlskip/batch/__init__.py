"""What a batch can be: a TensorDict, a DataProto, a mapping of columns, a list of mappings.

:mod:`rlskip.batch.columns` takes any of them apart into columns and rows;
:mod:`rlskip.batch.fields` has the names of fields, :mod:`rlskip.batch.prompts` the uids,
:mod:`rlskip.batch.meta` what trainers note beside the rows. Only the last imports no torch.
"""
