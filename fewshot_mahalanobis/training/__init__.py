"""Training: the backbone (``pretrain``) and the adaptation networks (``meta_train``)."""
