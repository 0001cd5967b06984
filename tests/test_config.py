"""Configurations: what they derive, what they refuse."""

import pytest
import torch
from conftest import BACKBONES, SPARSE, asymloop_config, fullloop_config
from transformers import AutoConfig, LlamaConfig, MixtralConfig

from asymloop_hf import AsymLoopConfig, AsymLoopForCausalLM, FullLoopConfig, FullLoopForCausalLM


def test_the_visits_of_a_token_are_derived():
    assert asymloop_config(num_encoder_layers=3, num_decoder_layers=2, num_loops=4).num_hidden_layers == 11
    assert fullloop_config(num_layers=3, num_loops=4).num_hidden_layers == 12


def test_layer_types_name_one_cache_slot_for_each_visit():
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "num_loops": 2}
    assert asymloop_config(**sizes).layer_types == ["full_attention"] * 5
    assert asymloop_config(**sizes, local_window=4).layer_types == ["full_attention"] + ["sliding_attention"] * 4
    # a window of 1 keeps nothing, and Transformers has no sliding layer that keeps nothing
    assert asymloop_config(**sizes, local_window=1).layer_types == ["full_attention"] * 5


@pytest.mark.parametrize(
    ("num_encoder_layers", "num_decoder_layers", "expected"),
    [(3, 3, [0, 1, 2]), (4, 2, [0, 2]), (2, 4, [0, 0, 1, 1]), (1, 3, [0, 0, 0]), (5, 3, [0, 1, 3])],
)
def test_each_decoder_layer_reads_the_encoder_layer_at_its_relative_depth(
    num_encoder_layers, num_decoder_layers, expected
):
    config = asymloop_config(num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers)
    assert config.global_kv_map == expected


@pytest.mark.parametrize("backbone", ["llama", "olmo", "olmo2", "olmoe"])
@pytest.mark.parametrize("size", ["60m", "130m", "350m", "1b"])
def test_presets_have_a_matched_full_loop(size, backbone):
    config = AsymLoopConfig.preset(size, backbone, num_loops=5)
    partner = config.matched_full_loop()
    assert isinstance(partner, FullLoopConfig)
    assert config.backbone == partner.backbone == backbone
    assert partner.num_loops == 3
    assert partner.num_hidden_layers == config.num_hidden_layers
    assert partner.hidden_size == config.hidden_size


def test_presets_with_experts_are_as_wide_in_a_token_as_the_dense_ones():
    config = AsymLoopConfig.preset("60m", "olmoe")
    assert (config.num_experts, config.num_experts_per_tok, config.intermediate_size) == (8, 2, 760)
    assert config.output_router_logits and config.matched_full_loop().output_router_logits
    assert AsymLoopConfig.preset("1b", num_experts=64, num_experts_per_tok=8).intermediate_size == 688
    assert AsymLoopConfig.preset("60m", "olmoe", intermediate_size=100).intermediate_size == 100
    with pytest.raises(ValueError, match="num_experts=0 is not allowed: it must be a positive integer with backbone"):
        AsymLoopConfig.preset("60m", "olmoe", num_experts=0)
    with pytest.raises(ValueError, match="num_experts_per_tok=0 is not allowed"):
        AsymLoopConfig.preset("60m", "olmoe", num_experts_per_tok=0)
    with pytest.raises(ValueError, match="backbone='gpt2' is not allowed: it must be one of .*'olmoe'"):
        AsymLoopConfig.preset("60m", "gpt2")


@pytest.mark.parametrize("name", BACKBONES)
def test_matched_models_of_each_backbone_have_the_same_parameters(name):
    config = asymloop_config(**BACKBONES[name])
    partner = config.matched_full_loop()
    assert AsymLoopForCausalLM(config).num_parameters() == FullLoopForCausalLM(partner).num_parameters()
    for field in ("backbone", "clip_qkv", "num_experts", "num_experts_per_tok", "norm_topk_prob"):
        assert getattr(partner, field) == getattr(config, field)


def test_a_model_with_one_sparse_stack_has_no_matched_full_loop():
    config = asymloop_config(num_experts=4, moe_stacks=["decoder"])
    with pytest.raises(ValueError, match="moe_stacks=.'decoder'. is not .*the layers of a Full Loop are all alike"):
        config.matched_full_loop()


@pytest.mark.parametrize("injection", ["none", "state", "embedding"])
@pytest.mark.parametrize("tied", [False, True])
def test_matched_models_have_the_same_parameters(injection, tied):
    config = asymloop_config(
        input_injection=injection, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, head_dim=12
    )
    partner = config.matched_full_loop()
    assert AsymLoopForCausalLM(config).num_parameters() == FullLoopForCausalLM(partner).num_parameters()
    assert partner.input_injection == ("none" if injection == "none" else "embedding")


def test_no_matched_full_loop_without_a_whole_number_of_loops():
    with pytest.raises(
        ValueError, match="num_loops=2 is not allowed.*effective depth 6 is a multiple of the 4 layers"
    ):
        asymloop_config(num_loops=2).matched_full_loop()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_encoder_layers", 0),
        ("num_encoder_layers", -1),
        ("num_decoder_layers", 2.0),
        ("num_decoder_layers", "2"),
        ("num_loops", 0),
        ("num_loops", True),
        ("num_loops", None),
        ("vocab_size", 0),
        ("hidden_size", -32),
        ("intermediate_size", 1.5),
        ("num_attention_heads", 0),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 7),
        ("head_dim", 0),
        ("max_position_embeddings", 0),
        ("global_kv_layers", [0]),
        ("global_kv_layers", [0, 1, 0]),
        ("global_kv_layers", [0, 2]),
        ("global_kv_layers", [-1, 0]),
        ("global_kv_layers", [0.0, 1]),
        ("global_kv_layers", 3),
        ("global_kv_layers", "01"),
        ("local_window", 0),
        ("local_window", -1),
        ("local_window", 2.5),
        ("decoder_init", "zeros"),
        ("input_injection", "both"),
        ("attention_dropout", 1.0),
        ("attention_dropout", -0.1),
        ("initializer_range", 0.0),
        ("embedding_initializer_range", -0.3),
        ("rms_norm_eps", 0),
        ("num_hidden_layers", 7),
        ("hidden_act", "sillu"),
        ("pad_token_id", 97),
        ("pad_token_id", "0"),
        ("local_window", "4"),
        ("attention_dropout", "0.1"),
        ("attention_dropout", None),
        ("initializer_range", None),
        ("initializer_range", float("inf")),
        ("rms_norm_eps", "1e-5"),
        ("tie_word_embeddings", "yes"),
        ("global_kv_layers", [True, False]),
        ("rope_parameters", "linear"),
        ("layer_types", ["full_attention"]),
        ("sliding_window", 3),
        ("global_kv_map", [0, 0]),
        ("backbone", "gpt2"),
        ("backbone", None),
        ("backbone", ["olmo"]),
        ("clip_qkv", 0),
        ("clip_qkv", -1.0),
        ("clip_qkv", "8"),
        ("num_experts", -1),
        ("num_experts", 2.0),
        ("num_experts", False),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", "2"),
        ("norm_topk_prob", 1),
        ("router_aux_loss_coef", -0.1),
        ("output_router_logits", "yes"),
        ("output_router_logits", True),
        ("moe_stacks", []),
        ("moe_stacks", "decoder"),
        ("moe_stacks", ["decoder", "decoder"]),
        ("moe_stacks", ["encoder", "head"]),
        ("moe_stacks", None),
    ],
)
def test_wrong_values_are_refused_by_name(field, value):
    with pytest.raises(ValueError) as error:
        asymloop_config(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field}={value!r} is not allowed: it must be ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 .* at most num_experts=4"),
        (
            {"backbone": "olmo", "num_experts": 4},
            r"num_experts=4 .* 0 with .* not of \('llama', 'olmoe'\)",
        ),
        ({"backbone": "olmo2", "num_experts": 4}, "num_experts=4 is not allowed"),
        ({"backbone": "olmoe"}, "num_experts=0 .* a positive integer with backbone='olmoe'"),
        ({"clip_qkv": 8.0}, r"clip_qkv=8.0 .* None with backbone='llama'; \('olmo', 'olmoe'\) can clip"),
        ({"backbone": "olmo2", "clip_qkv": 8.0}, "clip_qkv=8.0 .* None with backbone='olmo2'"),
        ({"backbone": "olmo", "mlp_bias": True}, "mlp_bias=True .* False with backbone='olmo'"),
        ({"num_experts": 4, "mlp_bias": True}, "mlp_bias=True .* num_experts=4; dense MLPs of .'llama',. can have"),
        (
            {"backbone": "olmoe", "num_experts": 4, "head_dim": 4},
            "head_dim=4 .* hidden_size / num_.*heads = 8",
        ),
    ],
)
@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_fields_that_do_not_go_together_are_refused(make_config, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(**fields)


@pytest.mark.parametrize(("field", "value"), [("num_layers", 0), ("num_loops", -2), ("input_injection", "state")])
def test_full_loop_refuses_wrong_values_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value!r} is not allowed: it must be "):
        fullloop_config(**{field: value})


def test_an_unknown_kind_of_rotary_positions_is_refused():
    with pytest.raises(ValueError, match=r"rope_parameters\['rope_type'\]='spiral' is not allowed"):
        asymloop_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})


def test_derived_fields_are_accepted_where_they_agree():
    config = asymloop_config(num_hidden_layers=8, sliding_window=None, layer_types=["full_attention"] * 8)
    assert config.num_hidden_layers == 8


def test_a_partner_shares_nothing_that_can_change():
    config = asymloop_config()
    config.matched_full_loop().rope_parameters["rope_theta"] = 5.0
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_a_llama_folder_can_be_read_as_a_full_loop(tmp_path):
    LlamaConfig(num_hidden_layers=3).save_pretrained(tmp_path)
    config = FullLoopConfig.from_pretrained(tmp_path, num_layers=3, num_loops=1)
    assert config.num_hidden_layers == 3


def test_a_mixtral_folder_can_be_read_as_a_full_loop(tmp_path):
    MixtralConfig(num_hidden_layers=3, num_local_experts=6).save_pretrained(tmp_path)
    config = FullLoopConfig.from_pretrained(tmp_path, num_layers=3, num_loops=1, norm_topk_prob=True)
    assert config.num_experts == config.num_local_experts == 6


@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_the_other_name_of_the_experts_is_checked_as_the_first(make_config):
    assert make_config(num_local_experts=4) == make_config(num_experts=4)
    assert make_config(num_local_experts=8, backbone="olmoe").base_model_ep_plan
    for fields, message in (
        ({"num_local_experts": -4}, "num_experts=-4 is not allowed"),
        ({"num_local_experts": 1}, "num_experts_per_tok=2 is not allowed: it must be at most num_experts=1"),
        ({"num_local_experts": 4, "backbone": "olmo"}, "num_experts=4 is not allowed"),
        ({"num_local_experts": 4, "num_experts": 6}, "num_local_experts=4 is not allowed: it must be num_experts=6"),
    ):
        with pytest.raises(ValueError, match=message):
            make_config(**fields)
    preset = AsymLoopConfig.preset("60m", num_local_experts=8)
    assert preset == AsymLoopConfig.preset("60m", num_experts=8)


def test_a_field_of_the_other_model_is_refused():
    with pytest.raises(ValueError, match=r"moe_stacks=\['encoder'\] .* left out: FullLoopConfig has no such field"):
        fullloop_config(num_experts=4, moe_stacks=["encoder"])
    with pytest.raises(ValueError, match="num_layers=4 is not allowed"):
        asymloop_config(num_layers=4)


def test_a_window_set_under_its_name_in_transformers_is_the_window():
    config = asymloop_config(local_window=3)
    config.sliding_window = 2
    assert config.local_window == 2


def test_the_plan_of_tensor_parallelism_is_that_of_the_backbone_and_its_experts():
    plan = fullloop_config().base_model_tp_plan
    assert plan == LlamaConfig.base_model_tp_plan
    assert fullloop_config(**BACKBONES["mixtral"]).base_model_tp_plan == MixtralConfig.base_model_tp_plan
    plan = asymloop_config(**BACKBONES["mixtral"], moe_stacks=["decoder"]).base_model_tp_plan
    assert plan["encoder.layers.*.mlp.down_proj"] == "rowwise"
    assert plan["decoder.layers.*.mlp.experts"] == "moe_tp_experts"
    assert "decoder.layers.*.mlp.down_proj" not in plan
    gathered = asymloop_config(**BACKBONES["olmo2"]).base_model_tp_plan
    assert gathered["decoder.layers.*.self_attn.q_proj"] == "colwise_gather_output"


def test_unknown_preset():
    with pytest.raises(ValueError, match="size='7b' is not allowed: it must be one of .*'60m', '130m', '350m', '1b'"):
        AsymLoopConfig.preset("7b")


def test_a_field_changed_later_is_checked_when_a_model_is_made():
    config = asymloop_config()
    config.num_loops = 0
    with pytest.raises(ValueError, match="num_loops=0"):
        AsymLoopForCausalLM(config)
    config = asymloop_config()
    config.backbone = "gpt2"
    with pytest.raises(ValueError, match="backbone='gpt2'"):
        AsymLoopForCausalLM(config)
    config = asymloop_config()
    with pytest.raises(ValueError, match="num_hidden_layers=4 .*8, the visits that follow from num_encoder_layers=2"):
        config.num_hidden_layers = 4


@pytest.mark.parametrize("name", ["llama", *SPARSE])
@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_round_trip_through_a_file(make_config, name, tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}
    config = make_config(num_loops=7, rope_parameters=rope, **BACKBONES[name])
    config.save_pretrained(tmp_path)
    loaded = type(config).from_pretrained(tmp_path)
    assert loaded.to_dict().items() >= {k: v for k, v in config.to_dict().items() if k != "auto_map"}.items()
    assert loaded.num_hidden_layers == config.num_hidden_layers
    assert type(config).from_pretrained(tmp_path, num_loops=1).num_loops == 1


@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_a_dtype_beside_the_folder_is_left_to_transformers(make_config, tmp_path):
    make_config().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, dtype="auto").num_loops == make_config().num_loops
    assert AutoConfig.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("make_config", [asymloop_config, fullloop_config])
def test_the_factor_of_the_load_balancing_loss_is_0_without_experts(make_config):
    assert make_config().router_aux_loss_coef == make_config(router_aux_loss_coef=0.3).router_aux_loss_coef == 0
    assert make_config(**BACKBONES["mixtral"]).router_aux_loss_coef == 0.01
