// Package diagnosis holds the tools that explain a node or a cluster to its operator. None of
// them changes it, but connectivity creates a namespace and removes it:
//
//	connectivity  traffic through Services of every kind on a live cluster
//	  echo    the server of the test
//	doctor  findings about a node's configuration and counters
//	drops   the packets that the kernel drops, and why
//	  cause   which policy or Service denied a packet
//	donottrackflow  what do-not-track policies mean for one flow
//	sysdump  the archive for a bug report
//	top     the flows that use conntrack most
//	trace   what happens to one new connection, which it may open
package diagnosis
