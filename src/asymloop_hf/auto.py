"""Auto registration: after `import asymloop_hf`, Transformers' Auto classes know both models and their heads."""

import transformers

from . import modeling

for config_class in (modeling.AsymLoopConfig, modeling.FullLoopConfig):
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)

for pretrained_class in (modeling.AsymLoopModel, modeling.FullLoopModel):
    for auto_class, path in pretrained_class._auto_map.items():
        if auto_class != "AutoConfig":
            model_class = getattr(modeling, path.split(".")[-1])
            getattr(transformers, auto_class).register(model_class.config_class, model_class, exist_ok=True)
