// Attention of bf16 queries.
//
// Knows nothing but their type.
#include "attention_walk.h"

void attention_of_pairs(const Problem& p, int64_t tokens, const Untyped& t) { attention_over<bf16>(p, tokens, t); }
