package nftables

import (
	"strings"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
)

// FuzzReadTable reads objects of a table that another program may have written: sets,
// chains, rules, helpers and elements, whole, cut short and lying about their length.
func FuzzReadTable(f *testing.F) {
	header := attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	set := append(attrs{}, header...)
	set.str(unix.NFTA_SET_NAME, "frontends")
	set.u32(unix.NFTA_SET_FLAGS, unix.NFT_SET_MAP)
	set.u32(unix.NFTA_SET_KEY_LEN, 12)
	chain := append(attrs{}, header...)
	chain.str(unix.NFTA_CHAIN_NAME, "services")
	at := chain.nest(unix.NFTA_CHAIN_HOOK)
	chain.u32(unix.NFTA_HOOK_HOOKNUM, 1)
	chain.u32(unix.NFTA_HOOK_PRIORITY, 0xffffff9c)
	chain.close(at)
	rule := append(attrs{}, header...)
	rule.str(unix.NFTA_RULE_CHAIN, "services")
	var own udata
	own.add(udataRuleSum, []byte("sum"))
	rule.bytes(unix.NFTA_RULE_USERDATA, own)
	element := append(attrs{}, header...)
	at = element.nest(unix.NFTA_SET_ELEM_KEY)
	element.bytes(unix.NFTA_DATA_VALUE, []byte("0123"))
	element.close(at)
	at = element.nest(unix.NFTA_SET_ELEM_DATA)
	verdict := element.nest(unix.NFTA_DATA_VERDICT)
	element.str(unix.NFTA_VERDICT_CHAIN, "spread")
	element.close(verdict)
	element.close(at)
	var comment udata
	comment.str(udataElemComment, "default/web http 80/TCP clusterIP")
	element.bytes(unix.NFTA_SET_ELEM_USERDATA, comment)
	for _, b := range [][]byte{set, chain, rule, element, header, {}, append(header[:4:4], 4, 0, 1), append(header[:4:4], 0xff, 0xff, 1, 0)} {
		f.Add(b)
		f.Add(b[:len(b)*3/4])
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		m := netlink.Message{Data: message}
		img := &image{sets: map[string]*foundSet{}, chains: map[string]*foundChain{"services": {}}, helpers: map[string]bool{}}
		img.addSet(m)
		img.addChain(m)
		img.addRule(m)
		img.addObject(m)
		if len(message) < 4 {
			return
		}
		key, v := readElement(message[4:])
		if len(key)+len(v.data)+len(v.jump)+len(v.comment) > 4*len(message) {
			t.Errorf("%d bytes are read as %q, %+v", len(message), key, v)
		}
		if id, _, ok := parsePort(v.comment, model.IPv4); ok && id.Service.Name == "" {
			t.Errorf("%q is %v", v.comment, id)
		}
	})
}

// FuzzParsePort reads comments of elements. A port that is read has the same name again.
func FuzzParsePort(f *testing.F) {
	for _, s := range []string{"default/web http 80/TCP clusterIP", "default/web 80/UDP nodePort", "web 80/TCP clusterIP", "a/b 99999/TCP clusterIP", "a/b -1/TCP clusterIP", "a/ 1/TCP clusterIP", "", "a/b 1/TCP x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, comment string) {
		id, kind, ok := parsePort(comment, model.IPv6)
		if !ok {
			return
		}
		text := describePort(id, kind)
		again, kind2, ok := parsePort(text, model.IPv6)
		if !ok || again != id || kind2 != kind || strings.Count(text, "\n") > 0 {
			t.Errorf("%q is %v, written as %q, which is %v", comment, id, text, again)
		}
	})
}
