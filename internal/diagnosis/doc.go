// Package diagnosis holds the tools that explain a node to its operator. None of them
// changes it:
//
//	doctor  findings about a node's configuration and counters
//	  ruleset  reads the rules of all programs, and finds what they do
//	drops   the packets that the kernel drops, and why
//	  cause   which policy or Service denied a packet
//	policyflow  what do-not-track policies mean for one flow
//	top     the flows that use conntrack most
package diagnosis
