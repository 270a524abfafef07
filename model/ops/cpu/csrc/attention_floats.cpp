// Attention of fp32 queries.
//
// Knows nothing but their type.
#include "attention_walk.h"

void attention_of_floats(const Problem& p, int64_t tokens, const Untyped& t) { attention_over<float>(p, tokens, t); }
