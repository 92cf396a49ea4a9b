package nft

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// FuzzReadTable reads objects of a table that another program may have written: sets,
// chains, rules, helpers and elements, whole, cut short and lying about their length.
func FuzzReadTable(f *testing.F) {
	header := func() attrs { return header(unix.NFPROTO_INET) }
	set := header()
	set.str(unix.NFTA_SET_NAME, "frontends")
	set.u32(unix.NFTA_SET_FLAGS, unix.NFT_SET_MAP)
	set.u32(unix.NFTA_SET_KEY_LEN, 12)
	chain := header()
	chain.str(unix.NFTA_CHAIN_NAME, "services")
	at := chain.nest(unix.NFTA_CHAIN_HOOK)
	chain.u32(unix.NFTA_HOOK_HOOKNUM, 1)
	chain.u32(unix.NFTA_HOOK_PRIORITY, 0xffffff9c)
	chain.close(at)
	rule := header()
	rule.str(unix.NFTA_RULE_CHAIN, "services")
	var own udata
	own.add(udataRuleSum, []byte("sum"))
	rule.bytes(unix.NFTA_RULE_USERDATA, own)
	element := header()
	at = element.nest(unix.NFTA_SET_ELEM_KEY)
	element.bytes(unix.NFTA_DATA_VALUE, []byte("0123"))
	element.close(at)
	at = element.nest(unix.NFTA_SET_ELEM_DATA)
	verdict := element.nest(unix.NFTA_DATA_VERDICT)
	element.str(unix.NFTA_VERDICT_CHAIN, "spread")
	element.close(verdict)
	element.close(at)
	var comment udata
	comment.str(udataComment, "default/web http 80/TCP clusterIP")
	element.bytes(unix.NFTA_SET_ELEM_USERDATA, comment)
	for _, b := range [][]byte{set, chain, rule, element, header(), {}, append(header(), 4, 0, 1), append(header(), 0xff, 0xff, 1, 0)} {
		f.Add(b)
		f.Add(b[:len(b)*3/4])
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		m := netlink.Message{Data: message}
		l := &Listing{Sets: map[string]*ListedSet{}, Chains: map[string]*ListedChain{"services": {}}, Helpers: map[string]bool{}}
		l.addSet(m)
		l.addChain(m)
		l.addRule(m)
		l.addObject(m)
		if len(message) < 4 {
			return
		}
		key, v := readElement(message[4:])
		if len(key)+len(v.Data)+len(v.Jump)+len(v.Comment) > 4*len(message) {
			t.Errorf("%d bytes are read as %q, %+v", len(message), key, v)
		}
	})
}
