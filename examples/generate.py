"""Continue a prompt with a trained checkpoint, with as many loops as it was trained with or with others.

python examples/generate.py --checkpoint asymloop-60m --prompt "The function returns" --num_loops 1 2 3
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import asymloop_hf  # noqa: F401  registers the models with the Auto classes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="a folder that save_pretrained has written")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--num_loops", type=int, nargs="+", help="default: as many as the model was trained with")
    parser.add_argument("--max_new_tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    args = parser.parse_args()
    if not args.prompt:
        parser.error("--prompt must not be empty")

    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    for num_loops in args.num_loops or [model.config.num_loops]:
        set_seed(args.seed)
        tokens = model.generate(**inputs, num_loops=num_loops, max_new_tokens=args.max_new_tokens, **sampling)
        print(f"--- num_loops={num_loops}\n{tokenizer.decode(tokens[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
