package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/nft"
)

// tableName is the name of kube-proxy's table in each family.
const tableName = "kube-proxy"

func findTables(ctx context.Context) ([]nft.Table, error) {
	var conn nft.Conn
	defer conn.Close()
	tables, err := conn.Tables(ctx)
	return slices.DeleteFunc(tables, func(t nft.Table) bool {
		return t.Name != tableName || t.Family != unix.NFPROTO_IPV4 && t.Family != unix.NFPROTO_IPV6
	}), err
}

// removeTables deletes tables with their contents, in one commit.
func removeTables(ctx context.Context, tables []nft.Table) error {
	var conn nft.Conn
	defer conn.Close()
	var all []*nft.Transaction
	for _, t := range tables {
		tx := nft.NewTransaction(t)
		tx.DeleteTable()
		all = append(all, tx)
	}
	if _, err := conn.Commit(ctx, all...); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove nft tables %v: %w", tables, err)
	}
	return nil
}

// keeper is an nft table with a nat chain that translates nothing. Its one rule matches
// conntrack's state, so that conntrack stays enabled.
//
// The kernel translates packets of a tracked connection only while the namespace has a
// nat chain. With the last one of a family, nf_nat_unregister_fn
// (net/netfilter/nf_nat_core.c) removes the NAT hooks of all hook points. With the last
// chain that needs conntrack, nf_ct_netns_put removes conntrack's hooks. One chain of
// family inet, at any hook point, keeps all hooks for both families.
var keeper = nft.Table{Name: "spillway-takeover", Family: unix.NFPROTO_INET}

// KeepNAT makes the kernel continue to translate existing connections after the removal
// of other nat chains. It lasts until ReleaseNAT, even after the end of this process.
func KeepNAT() error {
	if kept, err := NATKept(); kept || err != nil {
		return err
	}
	var conn nft.Conn
	defer conn.Close()
	tx := nft.NewTransaction(keeper)
	tx.AddTable()
	tx.AddChain(&nft.Chain{
		Name: "keep", Hook: &nft.Hook{Type: "nat", Num: unix.NF_INET_PRE_ROUTING, Priority: -100},
		Rules: []*nft.Rule{(&nft.Rule{}).Ct(unix.NFT_CT_STATE, nft.Reg)},
	})
	if _, err := conn.Commit(context.Background(), tx); err != nil {
		return fmt.Errorf("keep connections translated: add nft table %s: %w", keeper, err)
	}
	return nil
}

// NATKept reports whether KeepNAT is in effect.
func NATKept() (bool, error) {
	var conn nft.Conn
	defer conn.Close()
	tables, err := conn.Tables(context.Background())
	return slices.ContainsFunc(tables, keeper.Same), err
}

// ReleaseNAT ends KeepNAT. Translated connections then continue only while another nat
// chain exists.
func ReleaseNAT() error {
	if kept, err := NATKept(); !kept || err != nil {
		return err
	}
	return removeTables(context.Background(), []nft.Table{keeper})
}

// nftHolds reports over netlink whether iptables-nft or ip6tables-nft has a chain of
// kube-proxy.
func nftHolds(v6 bool) (bool, error) {
	var conn nft.Conn
	defer conn.Close()
	family := nft.Family(unix.NFPROTO_IPV4)
	if v6 {
		family = unix.NFPROTO_IPV6
	}
	chains, err := conn.Chains(context.Background())
	return slices.ContainsFunc(chains, func(c *nft.ListedChain) bool {
		return c.Table.Family == family && isOwn(c.Table.Name, c.Name)
	}), err
}
