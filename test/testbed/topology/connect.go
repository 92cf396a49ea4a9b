package topology

import (
	"context"
	"net/netip"
)

// routerHost is the host part of the LAN's router and of a node's cni0.
const routerHost = 1

// connectLAN connects nodes and clients to the LAN's bridge. The bridge has the address
// of a router that forwards nothing. Nodes have a default route, as real ones do: without
// it, connect to a Service address fails before it reaches a proxy. Packets on that route
// are lost.
func (b *builder) connectLAN(ctx context.Context) error {
	s, lan := b.c.Spec, b.networks[lanName]
	router4, router6 := nth(s.LAN4, routerHost), nth(s.LAN6, routerHost)
	bridge, err := lan.bridge("br0", macOf(0x0a, router4), ethernetMTU)
	if err != nil {
		return err
	}
	if err := lan.addresses("br0", inside(router4, s.LAN4), inside(router6, s.LAN6)); err != nil {
		return err
	}
	for _, h := range b.c.Hosts() {
		if h.Kind == KindPod {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		n := b.networks[h.Name]
		if _, err := lan.port(h.Name, bridge, n, macOf(0x0a, h.addr4), ethernetMTU); err != nil {
			return err
		}
		if err := n.addresses("eth0", inside(h.addr4, s.LAN4), inside(h.addr6, s.LAN6)); err != nil {
			return err
		}
		if h.Kind == KindNode {
			err = n.defaultRoute(router4, router6)
		} else {
			err = b.routeExternal(n)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// routeExternal adds a client's routes to externalIPs and load balancers.
func (b *builder) routeExternal(client *network) error {
	node := b.c.Node(0)
	for _, r := range b.c.Spec.ExternalRanges {
		if via := node.Addr(r.Addr()); via.IsValid() {
			if err := client.route(r, via, "eth0", false); err != nil {
				return err
			}
		}
	}
	return nil
}

// connectPods creates cni0 on each node and connects its pods to it.
func (b *builder) connectPods(ctx context.Context) error {
	mtu := b.c.Spec.podMTU()
	for i, node := range b.c.nodes {
		n := b.networks[node.Name]
		gw4, gw6 := nth(node.podCIDR4, routerHost), nth(node.podCIDR6, routerHost)
		bridge, err := n.bridge("cni0", macOf(0x0a, gw4), mtu)
		if err != nil {
			return err
		}
		if err := n.addresses("cni0", inside(gw4, node.podCIDR4), inside(gw6, node.podCIDR6)); err != nil {
			return err
		}
		for p := range b.c.Spec.PodsPerNode {
			if err := ctx.Err(); err != nil {
				return err
			}
			pod := b.c.Pod(i, p)
			peer := b.networks[pod.Name]
			l, err := n.port(pod.NodeDevice, bridge, peer, macOf(0x0a, pod.addr4), mtu)
			if err != nil {
				return err
			}
			// As in flannel's CNI configuration: a pod may receive its own packet to a
			// Service.
			if err := n.nl.LinkSetHairpin(l, true); err != nil {
				return n.fail("set hairpin mode of", pod.NodeDevice, err)
			}
			if err := peer.addresses("eth0", inside(pod.addr4, node.podCIDR4), inside(pod.addr6, node.podCIDR6)); err != nil {
				return err
			}
			if err := peer.defaultRoute(gw4, gw6); err != nil {
				return err
			}
		}
	}
	return nil
}

// routePods joins the nodes' pod CIDRs.
func (b *builder) routePods(ctx context.Context) error {
	for _, node := range b.c.nodes {
		if err := ctx.Err(); err != nil {
			return err
		}
		join := b.routeThroughLAN
		if b.c.Spec.PodNetwork == VXLAN {
			join = b.routeThroughVXLAN
		}
		if err := join(node); err != nil {
			return err
		}
	}
	return nil
}

// routeThroughLAN is flannel's host-gw.
func (b *builder) routeThroughLAN(node *Host) error {
	n := b.networks[node.Name]
	for _, other := range b.c.nodes {
		if other == node {
			continue
		}
		for _, cidr := range other.PodCIDRs {
			if err := n.route(cidr, other.Addr(cidr.Addr()), "eth0", false); err != nil {
				return err
			}
		}
	}
	return nil
}

// inside is an address with the length of the prefix it is in.
func inside(a netip.Addr, p netip.Prefix) netip.Prefix {
	return netip.PrefixFrom(a, p.Bits())
}
