/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Looks up the packets that IPsec (xfrm) policies may select. */
#ifndef SPILLWAY_LOOKUP_XFRM_H
#define SPILLWAY_LOOKUP_XFRM_H

#include "service.h"

/* May an IPsec policy select packets between the two addresses? */
static __always_inline int xfrm_selects(const struct settings *s, const struct addr *a,
					const struct addr *b, __u8 family)
{
	if (!(s->flags & SETTING_XFRM))
		return 0;
	return (range_contains(RANGE_XFRM_SRC, a, family) &&
		range_contains(RANGE_XFRM_DST, b, family)) ||
	       (range_contains(RANGE_XFRM_SRC, b, family) &&
		range_contains(RANGE_XFRM_DST, a, family));
}

#endif
