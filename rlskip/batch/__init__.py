"""What a batch can be: a TensorDict, a DataProto, a mapping of columns, a list of mappings.

Importing a module of this room does not load torch: where it is not loaded, no value is a tensor.
"""
