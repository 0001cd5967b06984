"""Our models, and the Transformers models they are held against, in the form that Transformers' common tests take.

`run.py` puts this file among those tests, which it downloads.
"""

import unittest
from unittest.mock import patch

import torch
from transformers import LlamaConfig, Olmo2Config, OlmoeConfig
from transformers.models.auto import modeling_auto
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmoe import modeling_olmoe

from asymloop_hf import AsymLoopConfig, FullLoopConfig
from asymloop_hf.modeling import modeling_asymloop, modeling_fullloop
from asymloop_hf.modeling.modeling_looped import LoopedPreTrainedModel

from . import test_expert_parallel_mixin, test_fsdp_mixin, test_tensor_parallel_mixin
from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_expert_parallel_mixin import ExpertParallelTesterMixin
from .test_fsdp_mixin import FSDPTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_tensor_parallel_mixin import TensorParallelTesterMixin
from .test_training_mixin import TrainingTesterMixin

# Transformers runs its distributed tests for some of its own kinds of models only.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_expert_parallel_mixin.EP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None

# The tests look a model's task up by the name of its class.
for kind, name in (("asymloop", "AsymLoop"), ("fullloop", "FullLoop")):
    modeling_auto.MODEL_MAPPING_NAMES[kind] = f"{name}Model"
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] = f"{name}ForCausalLM"
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[kind] = f"{name}ForSequenceClassification"
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[kind] = f"{name}ForTokenClassification"
    modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES[kind] = f"{name}ForQuestionAnswering"

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
ASYMLOOP = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_loops": 2}
FULLLOOP = {"num_layers": 1, "num_loops": 2}
DENSE = {"num_hidden_layers": 2}


class ModelTester:
    """Configurations and inputs of one kind of model."""

    is_training = True
    batch_size = 5
    seq_length = 7

    def __init__(self, config_class: type, causal_lm_class: type, fields: dict):
        self.config_class = config_class
        self.causal_lm_class = causal_lm_class
        self.fields = {**SIZES, **fields}
        self.num_hidden_layers = self.get_config().num_hidden_layers
        self.num_attention_heads = self.fields["num_attention_heads"]
        self.hidden_size = self.fields["hidden_size"]

    def get_config(self):
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.fields["vocab_size"])
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids).tril()}


# What a dense model of ours cannot do; Transformers' dense models skip these too.
DENSE_SKIPS = {
    "test_eager_matches_batched_and_grouped_inference": "no experts",
    "test_output_router_logits_from_config": "no routers",
}


class CommonTests(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """
    Of one kind of model; subclasses say of which.

    Args:
        config_class: its configuration.
        fields: of that configuration, besides `SIZES`.
        all_model_classes: the base model, the language model, and those with other heads.
    """

    model_tester = None
    config_class: type
    fields: dict

    def setUp(self):
        self.model_tester = ModelTester(self.config_class, self.all_model_classes[1], self.fields)
        if self._testMethodName == "test_tp_generation_quantized":
            self.skipTest("greedy choices of so small a random model change with the rounding: OLMoE's own do too")
        for name, reason in DENSE_SKIPS.items():
            if not self.is_sparse and self._testMethodName.startswith(name):
                self.skipTest(reason)
        self.config_tester = ConfigTester(self, config_class=self.config_class)

    @property
    def is_sparse(self) -> bool:
        return "num_experts" in self.fields

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_num_layers_is_small(self):
        """Of layers with weights of their own; a loop visits them several times."""
        model = self.all_model_classes[0](self.model_tester.get_config())
        assert sum(type(module).__name__.endswith("DecoderLayer") for module in model.modules()) <= 2


class DistributedTests(TensorParallelTesterMixin, ExpertParallelTesterMixin, FSDPTesterMixin): ...


class LoopedTests(CommonTests):
    test_can_init_all_missing_weights_before_2023 = True  # no year stands in our files

    def test_capture_outputs_decorator(self):
        """It asks for everything that a class can record; asking a dense model for router logits is an error here."""
        recorded = dict(LoopedPreTrainedModel._can_record_outputs)
        if not self.is_sparse:
            del recorded["router_logits"]
        with patch.object(LoopedPreTrainedModel, "_can_record_outputs", recorded):
            super().test_capture_outputs_decorator()


def model_classes(modeling, name: str) -> tuple[type, ...]:
    heads = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
    return tuple(getattr(modeling, name + head) for head in heads if hasattr(modeling, name + head))


class AsymLoopTests(LoopedTests):
    config_class = AsymLoopConfig
    all_model_classes = model_classes(modeling_asymloop, "AsymLoop")


class FullLoopTests(LoopedTests):
    config_class = FullLoopConfig
    all_model_classes = model_classes(modeling_fullloop, "FullLoop")


class LlamaModelTest(CommonTests, DistributedTests, unittest.TestCase):
    config_class = LlamaConfig
    all_model_classes = model_classes(modeling_llama, "Llama")
    fields = DENSE


class Olmo2ModelTest(CommonTests, unittest.TestCase):
    config_class = Olmo2Config
    all_model_classes = model_classes(modeling_olmo2, "Olmo2")
    fields = DENSE


class OlmoeModelTest(CommonTests, DistributedTests, unittest.TestCase):
    config_class = OlmoeConfig
    all_model_classes = model_classes(modeling_olmoe, "Olmoe")
    fields = DENSE | EXPERTS


class AsymLoopModelTest(AsymLoopTests, DistributedTests, unittest.TestCase):
    fields = ASYMLOOP


class AsymLoopWindowModelTest(AsymLoopTests, DistributedTests, unittest.TestCase):
    fields = ASYMLOOP | {"local_window": 3}


class AsymLoopOlmo2ModelTest(AsymLoopTests, unittest.TestCase):
    all_model_classes = AsymLoopTests.all_model_classes[:2]
    fields = ASYMLOOP | {"backbone": "olmo2"}


class AsymLoopOlmoeModelTest(AsymLoopTests, DistributedTests, unittest.TestCase):
    all_model_classes = AsymLoopTests.all_model_classes[:2]  # as Transformers has no other heads for OLMoE
    fields = ASYMLOOP | EXPERTS | {"backbone": "olmoe"}


class FullLoopModelTest(FullLoopTests, DistributedTests, unittest.TestCase):
    fields = FULLLOOP


class FullLoopOlmoeModelTest(FullLoopTests, DistributedTests, unittest.TestCase):
    all_model_classes = FullLoopTests.all_model_classes[:2]
    fields = FULLLOOP | EXPERTS | {"backbone": "olmoe"}
