"""The models: the files that travel with a checkpoint."""

from .cache_asymloop import AsymLoopCache
from .configuration_asymloop import AsymLoopConfig
from .configuration_fullloop import FullLoopConfig
from .modeling_asymloop import (
    AsymLoopForCausalLM,
    AsymLoopForQuestionAnswering,
    AsymLoopForSequenceClassification,
    AsymLoopForTokenClassification,
    AsymLoopModel,
)
from .modeling_fullloop import (
    FullLoopForCausalLM,
    FullLoopForQuestionAnswering,
    FullLoopForSequenceClassification,
    FullLoopForTokenClassification,
    FullLoopModel,
)

__all__ = [
    "AsymLoopCache",
    "AsymLoopConfig",
    "AsymLoopForCausalLM",
    "AsymLoopForQuestionAnswering",
    "AsymLoopForSequenceClassification",
    "AsymLoopForTokenClassification",
    "AsymLoopModel",
    "FullLoopConfig",
    "FullLoopForCausalLM",
    "FullLoopForQuestionAnswering",
    "FullLoopForSequenceClassification",
    "FullLoopForTokenClassification",
    "FullLoopModel",
]
