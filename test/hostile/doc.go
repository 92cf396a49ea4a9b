// Package hostile sets attackers on honest connections, on every dataplane, with
// real packets between network namespaces. The package holds tests only.
//
// Attackers are an outside host on the LAN that forges any source address, a pod
// with NET_RAW or NET_ADMIN, and a pod of another node. Honest clients use plain
// sockets and compare every byte that they receive. Three invariants hold
// whatever an attacker sends:
//
//   - an honest connection does not break,
//   - an honest connection receives no byte that its server did not send to it,
//   - a new honest client connects within 5 s.
//
// Each scenario runs for both families, with the endpoint on the node that
// receives the packets ("here") and on the other node ("elsewhere"). The nodes
// have 1,024 SNAT ports and a flow table of 4,096 entries, so that a flood is
// short. A scenario that a dataplane does not promise names the dataplanes that
// do.
//
// Tenants write objects of their own namespace beside the Services of others.
package hostile
