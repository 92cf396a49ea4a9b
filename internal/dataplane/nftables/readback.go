package nftables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// image is what the kernel holds in our table.
type image struct {
	generation uint32 // nf_tables' own number for this state
	there      bool   // the table is there and not dormant
	dormant    bool
	owned      bool // by a program that has locked the table (flag owner)
	sets       map[string]*foundSet
	chains     map[string]*foundChain
	helpers    map[string]bool
}

// foundSet is a set as the kernel tells it.
type foundSet struct {
	flags, keyLen, dataLen uint32
	counted                bool
	elems                  map[string]*value
}

// foundChain is a chain as the kernel tells it.
type foundChain struct {
	hook   hook
	policy uint32
	sums   string
}

// snapshotTries bounds how often the agent reads a table again because another program
// changed it meanwhile.
const snapshotTries = 3

// read reads the table, with or without elements. While others change theirs
// all the time, the last attempt counts; generation is then one that does not
// hold any more.
func (s *socket) read(table string, elements bool) (*image, error) {
	var img *image
	for range snapshotTries {
		before, err := s.generation()
		if err != nil {
			return nil, err
		}
		if img, err = s.readOnce(table, elements); err != nil {
			return nil, fmt.Errorf("read table %s: %w", table, err)
		}
		img.generation = before
		after, err := s.generation()
		if err != nil {
			return nil, err
		}
		if before == after {
			break
		}
	}
	return img, nil
}

func (s *socket) readOnce(table string, elements bool) (*image, error) {
	img := &image{sets: map[string]*foundSet{}, chains: map[string]*foundChain{}, helpers: map[string]bool{}}
	if err := s.readFlags(table, img); err != nil || !img.there && !img.dormant {
		return img, err
	}
	if err := s.dump(unix.NFT_MSG_GETSET, table, unix.NFTA_SET_TABLE, img.addSet); err != nil {
		return nil, err
	}
	if err := s.dump(unix.NFT_MSG_GETCHAIN, table, unix.NFTA_CHAIN_TABLE, img.addChain); err != nil {
		return nil, err
	}
	if err := s.dump(unix.NFT_MSG_GETRULE, table, unix.NFTA_RULE_TABLE, img.addRule); err != nil {
		return nil, err
	}
	if err := s.dump(unix.NFT_MSG_GETOBJ, table, unix.NFTA_OBJ_TABLE, img.addObject); err != nil {
		return nil, err
	}
	for name, fs := range img.sets {
		if !elements || fs.flags&unix.NFT_SET_EVAL != 0 {
			continue // not asked for, or filled by packets
		}
		if err := s.dumpElements(table, name, fs); err != nil {
			return nil, err
		}
	}
	return img, nil
}

// readFlags finds out whether the table is there. It lists all tables, so that
// one that is missing is no error.
func (s *socket) readFlags(table string, img *image) error {
	answers, err := s.request(unix.NFT_MSG_GETTABLE, netlink.Dump, attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0})
	if err != nil {
		return err
	}
	for _, m := range answers {
		name, flags := "", uint32(0)
		for typ, v := range attributes(m) {
			switch typ {
			case unix.NFTA_TABLE_NAME:
				name = cString(v)
			case unix.NFTA_TABLE_FLAGS:
				flags = number(v)
			}
		}
		if name == table {
			img.there = flags&unix.NFT_TABLE_F_DORMANT == 0
			img.dormant = !img.there
			img.owned = flags&tableOwner != 0
		}
	}
	return nil
}

const tableOwner = 2 // NFT_TABLE_F_OWNER; Linux 5.12

// dump lists all objects of a kind in the table. Older kernels do not filter
// all kinds by table.
func (s *socket) dump(typ int, table string, tableAttr uint16, take func(netlink.Message)) error {
	a := attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	a.str(tableAttr, table)
	return s.each(typ, netlink.Dump, a, func(m netlink.Message) {
		for t, v := range attributes(m) {
			if t == tableAttr && cString(v) == table {
				take(m)
			}
		}
	})
}

func (img *image) addSet(m netlink.Message) {
	fs, name := &foundSet{elems: map[string]*value{}}, ""
	for typ, v := range attributes(m) {
		switch typ {
		case unix.NFTA_SET_NAME:
			name = cString(v)
		case unix.NFTA_SET_FLAGS:
			fs.flags = number(v)
		case unix.NFTA_SET_KEY_LEN:
			fs.keyLen = number(v)
		case unix.NFTA_SET_DATA_LEN:
			fs.dataLen = number(v)
		case setExpr:
			fs.counted = true
		}
	}
	img.sets[name] = fs
}

func (img *image) addChain(m netlink.Message) {
	fc, name := &foundChain{}, ""
	for typ, v := range attributes(m) {
		switch typ {
		case unix.NFTA_CHAIN_NAME:
			name = cString(v)
		case unix.NFTA_CHAIN_TYPE:
			fc.hook.typ = cString(v)
		case unix.NFTA_CHAIN_POLICY:
			fc.policy = number(v)
		case unix.NFTA_CHAIN_HOOK:
			for t, h := range nested(v) {
				switch t {
				case unix.NFTA_HOOK_HOOKNUM:
					fc.hook.num = number(h)
				case unix.NFTA_HOOK_PRIORITY:
					fc.hook.priority = int32(number(h))
				}
			}
		}
	}
	img.chains[name] = fc
}

func (img *image) addRule(m netlink.Message) {
	chain, sum := "", "somebody's"
	for typ, v := range attributes(m) {
		switch typ {
		case unix.NFTA_RULE_CHAIN:
			chain = cString(v)
		case unix.NFTA_RULE_USERDATA:
			if own := udata(v).get(udataRuleSum); own != nil {
				sum = string(own)
			}
		}
	}
	if fc := img.chains[chain]; fc != nil {
		fc.sums += sum
	}
}

func (s *socket) dumpElements(table, name string, fs *foundSet) error {
	a := attrs{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}
	a.str(unix.NFTA_SET_ELEM_LIST_TABLE, table)
	a.str(unix.NFTA_SET_ELEM_LIST_SET, name)
	err := s.each(unix.NFT_MSG_GETSETELEM, netlink.Dump, a, func(m netlink.Message) {
		for typ, list := range attributes(m) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			for _, e := range nested(list) {
				key, v := readElement(e)
				fs.elems[key] = v
			}
		}
	})
	if err != nil {
		return fmt.Errorf("read elements of set %s: %w", name, err)
	}
	return nil
}

func readElement(e []byte) (key string, out *value) {
	out = &value{}
	for typ, v := range nested(e) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			key = dataOf(v)
		case setElemKeyEnd:
			out.end = dataOf(v)
		case unix.NFTA_SET_ELEM_FLAGS:
			out.flags = number(v)
		case unix.NFTA_SET_ELEM_DATA:
			out.data, out.jump = dataOf(v), jumpOf(v)
		case unix.NFTA_SET_ELEM_USERDATA:
			out.comment = udata(v).getString(udataElemComment)
		}
	}
	return key, out
}

func dataOf(b []byte) string {
	for typ, v := range nested(b) {
		if typ == unix.NFTA_DATA_VALUE {
			return string(v)
		}
	}
	return ""
}

// jumpOf is the chain that a verdict leads to, "" if it is none.
func jumpOf(b []byte) (chain string) {
	for typ, v := range nested(b) {
		if typ != unix.NFTA_DATA_VERDICT {
			continue
		}
		for t, name := range nested(v) {
			if t == unix.NFTA_VERDICT_CHAIN {
				chain = cString(name)
			}
		}
	}
	return chain
}

func cString(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

func number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// fits tells whether a set is what it should be; what it holds is another
// question.
func (fs *foundSet) fits(s *set) bool {
	const ours = unix.NFT_SET_MAP | unix.NFT_SET_INTERVAL | nftSetConcat | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL | unix.NFT_SET_CONSTANT
	return fs.flags&ours == s.flags() && fs.counted == s.counted && fs.keyLen == sizeOf(s.key) &&
		(s.verdict || fs.dataLen == sizeOf(s.data))
}

// against turns a change of an empty table into one of the table as it was
// found. It reports false where that cannot be: the table has to be made anew.
func (c *change) against(img *image) bool {
	c.found = true
	known := map[string]*set{}
	for _, s := range c.t.layout.sets {
		known[s.name] = s
	}
	for name, fs := range img.sets {
		s := known[name]
		switch {
		case s == nil:
			c.strangers = append(c.strangers, name)
			continue
		case !fs.fits(s):
			return false
		}
		c.t.exists[name] = true
		c.t.count[name] = len(fs.elems)
		for key, v := range fs.elems {
			c.elem(&elem{set: s, key: key}).had = v
		}
	}
	c.t.helpers = maps.Clone(img.helpers)
	return c.againstChains(img)
}

func (c *change) againstChains(img *image) bool {
	for name, fc := range img.chains {
		want := hooks[name]
		if want == nil {
			want = &hook{}
		} else if fc.policy != nfAccept {
			return false
		}
		if fc.hook != *want {
			return false
		}
		c.t.chains[name] = fc.sums
	}
	return true
}

// shapedAs tells whether the table has the sets, chains and rules that were
// written, and no others.
func (img *image) shapedAs(t *table) bool {
	sets := 0
	for name, is := range t.exists {
		if is {
			sets++
		}
		if is && img.sets[name] == nil {
			return false
		}
	}
	for name, sums := range t.chains {
		fc := img.chains[name]
		if fc == nil || fc.sums != sums || fc.hook.typ != "" && fc.policy != nfAccept {
			return false
		}
	}
	return img.there && sets == len(img.sets) && len(t.chains) == len(img.chains) && maps.Equal(t.helpers, img.helpers)
}
