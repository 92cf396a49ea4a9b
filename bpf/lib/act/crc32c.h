/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The incremental update of SCTP's CRC32c (RFC 9260, appendix A). The CRC covers the ports,
 * but no IP address. It is linear: changed bytes change it by the CRC of the difference
 * alone, which starts with 0 and is not inverted. The difference is 0 but for the ports, and
 * each 0 byte after them multiplies it by x^8. So the cost does not depend on the content.
 */
#ifndef SPILLWAY_ACT_CRC32C_H
#define SPILLWAY_ACT_CRC32C_H

#include "../base.h"

#define CRC32C_POLYNOMIAL 0x82f63b78 /* the bit of x^31 is the lowest */

/* x^8, and each next one squared, modulo the polynomial. */
static const __u32 crc32c_powers[16] = {
	0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a,
	0xb82be955, 0xb8fdb1e7, 0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a,
	0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
};

/* Multiplies two polynomials modulo CRC32c's. */
__noinline __u32 crc32c_multiply(__u32 a, __u32 b)
{
	__u32 product = 0;

	for (int i = 0; i < 32; i++) {
		product ^= b & -(a >> 31);
		a <<= 1;
		b = b >> 1 ^ (CRC32C_POLYNOMIAL & -(b & 1));
	}
	return product;
}

/*
 * Returns the change of the CRC of len bytes, at most 65,535, whose first four bytes change by
 * change, in the order of memory.
 */
static __always_inline __u32 crc32c_shift(__u32 change, __u32 len)
{
	for (int i = 0; i < 16; i++) {
		if (len >> i & 1)
			change = crc32c_multiply(change, crc32c_powers[i]);
	}
	return change;
}

#endif
