"""What every head is: support features and labels in, logits of query features out.

    logits = head(support_features, support_labels, query_features)
    state = head.fit(support_features, support_labels); logits = head.logits(state, query_features)

A head is one class. What other parts of the package need to know about it is in its attributes and methods: its name in
settings and its titles in tables, exact leave-one-out, the settings that it chooses on a support set, what it learns
from unlabelled examples, its form in an exported graph, and its description in a file. Only ``fit`` and ``logits`` have
to be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from fewshot_mahalanobis.gaussians.plda import PldaSettings
from fewshot_mahalanobis.gaussians.pool import Pool
from fewshot_mahalanobis.gaussians.support import check_support, result_dtype

State = TypeVar("State")


class Head(nn.Module, Generic[State]):
    """A classifier fitted to the support features of one task.

    Features are finite floating-point tensors of shape (n, d), labels int64 of shape (n,) in 0..k-1, each with at
    least one example. Heads compute in float32 or float64 outside autocast whatever the features' dtype, and are
    differentiable with respect to support and query features. ValueError on anything else.

    Attributes
    ----------
    name : str
        Name in settings and on the command line.
    title : str
        Name in our tables; by default ``name``, or the name of the class.
    paper_title : str
        Name in the paper's tables: the method that uses it. Empty if the paper has none.
    distance_power : int
        p, where logits are minus the p-th power of distances to class means, up to a factor; 0 for other logits.
    learns_unlabelled : bool
        Whether it has :meth:`unlabelled_settings` and :meth:`fit_pool`.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    paper_title: ClassVar[str] = ""
    distance_power: ClassVar[int] = 0
    learns_unlabelled: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.name or cls.__name__
        cls.title = cls.title or cls.name

    def fit(self, support_features: Tensor, support_labels: Tensor) -> State:
        """Fit to support features (n, d) and labels (n,); the state serves any number of queries."""
        raise NotImplementedError

    def fit_groups(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None) -> State:
        """Fit to a support set in which examples of one group, numbers (n,), are copies of each other.

        By default groups are ignored. A head that uses class sizes should use effective sizes.
        """
        return self.fit(support_features, support_labels)

    def logits(self, state: State, query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d)."""
        raise NotImplementedError

    def export(self, state: State) -> nn.Module:
        """Return the fitted head as a module, features (m, d) -> logits (m, k), in float32, for ONNX and torch.export.

        The module must have no checks and no control flow that depends on data. This one calls ``logits``, which serves
        where ``logits`` has neither. ValueError if a head has no such form.
        """
        return _ExportedHead(self, state)

    def check_learns_unlabelled(self) -> None:
        """Raise ValueError unless this head learns from unlabelled examples."""
        if not self.learns_unlabelled:
            raise ValueError(
                f'the heads "auto" and "mahalanobis" learn from unlabelled examples, {type(self).__name__} does not: '
                "choose one of them, or leave out unlabelled= and transductive="
            )

    def settled(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None) -> Head[State]:
        """Return this head with every setting fixed that ``fit`` would choose on the support set (n, d), (n,).

        Choices by leave-one-out leave out whole ``groups`` (n,). Most heads choose nothing and return themselves.
        """
        return self

    def common_distance(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Part (n,) of the negated left-out logits that all classes have in common; 0 by default."""
        return support_features.new_zeros(len(support_features))

    def unlabelled_settings(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None
    ) -> PldaSettings:
        """Settings of the model by which this head finds the classes of unlabelled examples (``unlabelled.py``)."""
        raise NotImplementedError

    def fit_pool(self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None, pool: Pool) -> State:
        """Fit to a support set and to unlabelled examples of which the memberships are known."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the settings as JSON values, from which :meth:`from_description` makes the same head.

        ValueError if they do not describe it, as with learned weights.
        """
        return {}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Head[Any]:
        """Make a head from what :meth:`describe` returned. ValueError or TypeError if it does not fit."""
        return cls(**description)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Head[Any]:
        """Make the head of a model with these settings (``SimpleCNAPS.config``). ValueError if it has to be learned."""
        return cls()

    def leave_one_out_logits(
        self, support_features: Tensor, support_labels: Tensor, groups: Tensor | None = None
    ) -> Tensor:
        """Logits (n, k) of each support example by the head fitted to the others.

        This takes a fit for each group; the package's heads have shortcuts.

        Parameters
        ----------
        support_features : Tensor of shape (n, d)
        support_labels : int64 Tensor of shape (n,)
        groups : int64 Tensor of shape (n,), optional
            Examples of equal number, such as copies of a picture, are left out together, whatever their classes.
            By default each is left out alone.

        Returns
        -------
        Tensor of shape (n, k)
            Minus infinity where a class has no example outside the group.
        """
        counts = check_support(support_features, support_labels)
        numbers = torch.arange(len(support_labels), device=support_labels.device) if groups is None else groups
        order, rows = [], []
        for group in numbers.unique().tolist():
            left_out, rest = (numbers == group).nonzero()[:, 0], numbers != group
            present, labels = support_labels[rest].unique(return_inverse=True)
            if len(present) == 0:
                row = support_features.new_full((len(left_out), 0), -torch.inf, dtype=result_dtype(support_features))
            else:
                state = self.fit_groups(support_features[rest], labels, None if groups is None else groups[rest])
                row = self.logits(state, support_features[left_out])
            if len(present) < len(counts):
                row = row.new_full((len(left_out), len(counts)), -torch.inf).index_copy(1, present, row)
            order.append(left_out)
            rows.append(row)
        return torch.cat(rows)[torch.cat(order).argsort()]

    def forward(self, support_features: Tensor, support_labels: Tensor, query_features: Tensor) -> Tensor:
        """Logits (m, k) of query features (m, d), given support features (n, d) and labels (n,)."""
        return self.logits(self.fit(support_features, support_labels), query_features)


class _ExportedHead(nn.Module):
    """A fitted head as it is."""

    def __init__(self, head: Head[Any], state: Any) -> None:
        super().__init__()
        self.head, self.state = head, state

    def forward(self, x: Tensor) -> Tensor:
        return self.head.logits(self.state, x).float()
