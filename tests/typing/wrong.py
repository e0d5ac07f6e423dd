"""Calls that a type checker refuses; each line names the kind of error."""

import vkv

vkv.save("a.vkv", [], codek="raw")  # error: call-arg
vkv.load("a.vkv", live="pakced")  # error: arg-type
vkv.load(3)  # error: arg-type
print(vkv.inspect("a.vkv").acounting)  # error: attr-defined
vkv.convert("a.safetensors")  # error: call-arg
vkv.validate("a.vkv", deep="yes")  # error: arg-type
vkv.lode("a.vkv")  # error: attr-defined
vkv.PromptStore(max_byte="2GB")  # error: call-arg
