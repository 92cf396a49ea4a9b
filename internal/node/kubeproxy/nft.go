package kubeproxy

import (
	"errors"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// nftTable is a table of kube-proxy's nftables mode.
type nftTable struct{ *nftables.Table }

func (t nftTable) String() string {
	if t.Family == nftables.TableFamilyIPv6 {
		return "ip6 " + t.Name
	}
	return "ip " + t.Name
}

// tableName is the name of kube-proxy's table in each family.
const tableName = "kube-proxy"

func listTables() ([]*nftables.Table, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("list nft tables: %w", err)
	}
	tables, err := c.ListTables()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil // a kernel without nf_tables
	}
	if err != nil {
		return nil, fmt.Errorf("list nft tables: %w", err)
	}
	return tables, nil
}

func findTables() ([]nftTable, error) {
	tables, err := listTables()
	var found []nftTable
	for _, t := range tables {
		if t.Name == tableName && (t.Family == nftables.TableFamilyIPv4 || t.Family == nftables.TableFamilyIPv6) {
			found = append(found, nftTable{t})
		}
	}
	return found, err
}

// removeTables deletes tables with their contents, in one commit.
func removeTables(tables []nftTable) error {
	c, err := nftables.New()
	if err == nil {
		for _, t := range tables {
			c.DelTable(t.Table)
		}
		err = c.Flush()
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
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
var keeper = &nftables.Table{Name: "spillway-takeover", Family: nftables.TableFamilyINet}

// KeepNAT makes the kernel continue to translate existing connections after the removal
// of other nat chains. It lasts until ReleaseNAT, even after the end of this process.
func KeepNAT() error {
	if kept, err := NATKept(); kept || err != nil {
		return err
	}
	c, err := nftables.New()
	if err == nil {
		c.AddTable(keeper)
		accept := nftables.ChainPolicyAccept
		chain := c.AddChain(&nftables.Chain{
			Name: "keep", Table: keeper, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest, Policy: &accept,
		})
		c.AddRule(&nftables.Rule{Table: keeper, Chain: chain, Exprs: []expr.Any{&expr.Ct{Key: expr.CtKeySTATE, Register: 1}}})
		err = c.Flush()
	}
	if err != nil {
		return fmt.Errorf("keep connections translated: add nft table inet %s: %w", keeper.Name, err)
	}
	return nil
}

// NATKept reports whether KeepNAT is in effect.
func NATKept() (bool, error) {
	tables, err := listTables()
	return slices.ContainsFunc(tables, isKeeper), err
}

// ReleaseNAT ends KeepNAT. Translated connections then continue only while another nat
// chain exists.
func ReleaseNAT() error {
	kept, err := NATKept()
	if err != nil || !kept {
		return err
	}
	c, err := nftables.New()
	if err == nil {
		c.DelTable(keeper)
		err = c.Flush()
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove nft table inet %s: %w", keeper.Name, err)
	}
	return nil
}

func isKeeper(t *nftables.Table) bool { return t.Name == keeper.Name && t.Family == keeper.Family }

// nftHolds reports over netlink whether iptables-nft or ip6tables-nft has a chain of
// kube-proxy.
func nftHolds(v6 bool) (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("list nft chains: %w", err)
	}
	family := nftables.TableFamilyIPv4
	if v6 {
		family = nftables.TableFamilyIPv6
	}
	chains, err := c.ListChainsOfTableFamily(family)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("list nft chains: %w", err)
	}
	return slices.ContainsFunc(chains, func(ch *nftables.Chain) bool { return isOwn(ch.Table.Name, ch.Name) }), nil
}
