package sysdump

import (
	"regexp"
	"slices"
	"strings"
)

// Mark replaces a secret.
const Mark = "REDACTED"

// secretWords are parts of the names of values that may be secret.
const secretWords = `password|passwd|passphrase|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credential|client-key|dsr-key|maglev-seed|client-certificate|certificate-authority|authorization|session[_-]?key`

// named begins a pattern for a value with such a name. A parenthesis after what is between
// the two must follow.
const named = `(?i)([\w.-]*(?:` + secretWords + `)[\w.-]*`

// inKey has the characters of a key's lines, of its headers, and of the times that a log puts before
// them. It has no quote: text that others choose is quoted, and so removes nothing else.
const inKey = `[A-Za-z0-9+/=\s\\,:.-]`

var secretName = regexp.MustCompile(`(?i)` + secretWords)

// rule replaces what a pattern finds.
type rule struct {
	pattern *regexp.Regexp
	with    string
}

// rules find secrets by their form, in their order. Each removes rather too much than too
// little.
var rules = []rule{
	// Private keys, also a part of one: a tail of a log may begin or end inside.
	{regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----` + inKey + `*?-----END [A-Z0-9 ]*PRIVATE KEY-----`), Mark},
	{regexp.MustCompile(`\A` + inKey + `*-----END [A-Z0-9 ]*PRIVATE KEY-----`), Mark},
	{regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----` + inKey + `*`), Mark},
	// The same in base64, as in a kubeconfig: the beginning is "-----BEGIN".
	{regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/=]*`), Mark},
	// JSON web tokens, as those of ServiceAccounts.
	{regexp.MustCompile(`eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), Mark},
	// Credentials in URLs. A password may have any characters but blanks and quotes.
	{regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s"'<>@/]*(?::[^\s"'<>@]*)?@`), "${1}" + Mark + "@"},
	// "Authorization: Bearer …" with the scheme, and the schemes anywhere.
	{regexp.MustCompile(`(?i)\b(authorization\\*["']?\s*[:=]\s*\\*["'\[]*)[^\r\n"'\]\\]+`), "${1}" + Mark},
	{regexp.MustCompile(`(?i)\b(bearer|basic|token|apikey)(\s+)[A-Za-z0-9+/_.=~-]{8,}`), "${1}${2}" + Mark},
	{regexp.MustCompile(`(?i)\b((?:set-)?cookie:\s*)[^\r\n"\\]+`), "${1}" + Mark},
	// Values with names. In JSON, in JSON inside of a string, and in quotes:
	{regexp.MustCompile(named + `\\*["']?\s*[:=]\s*)(\\+")[^"\\]*\\+"`), "${1}${2}" + Mark + "${2}"},
	{regexp.MustCompile(named + `\\*["']?\s*[:=]\s*)"(?:[^"\\]|\\.)*"`), `${1}"` + Mark + `"`},
	{regexp.MustCompile(named + `\\*["']?\s*[:=]\s*)'[^'\n]*'`), "${1}'" + Mark + "'"},
	// A number or a boolean of JSON becomes a string.
	{regexp.MustCompile(named + `(\\*["'])\s*:\s*)[^\s{}\[\],"'\\]+`), "${1}${2}" + Mark + "${2}"},
	// In YAML, where a value may have several lines, in logs, and in flags.
	{regexp.MustCompile(named + `:[ \t]*[|>][-+0-9]*[ \t]*\n)(?:[ \t]+[^\n]*\n?)+`), "${1}  " + Mark + "\n"},
	{regexp.MustCompile(named + `=)[^\s"'\\]+`), "${1}" + Mark},
	{regexp.MustCompile(named + `:[ \t]*)[|>]?[^\s{}\[\],"'\\|>][^\s{}\[\],"'\\]*`), "${1}" + Mark},
	{regexp.MustCompile(`(?i)(--[\w-]*(?:` + secretWords + `)[\w-]*[ \t]+)[^\s"'-][^\s"']*`), "${1}" + Mark},
	// Known forms of tokens, wherever they are.
	{regexp.MustCompile(`\b(?:AKIA|ASIA)[0-9A-Z]{16}\b`), Mark},
	{regexp.MustCompile(`\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{10,}`), Mark},
}

// Redactor removes secrets from text.
type Redactor struct{ known []string }

// leastKnown is the length of the shortest known secret that is searched for: a shorter one
// would remove parts of other words.
const leastKnown = 6

// NewRedactor returns a redactor that removes these secrets wherever they are, beside those
// that it recognizes by their form and name.
func NewRedactor(known ...string) *Redactor {
	r := &Redactor{}
	for _, s := range known {
		if s = strings.TrimSpace(s); len(s) >= leastKnown {
			r.known = append(r.known, s)
		}
	}
	// A secret may be a part of another.
	slices.SortFunc(r.known, func(a, b string) int { return len(b) - len(a) })
	return r
}

// Text returns the text without secrets.
func (r *Redactor) Text(text string) string {
	for _, s := range r.known {
		text = strings.ReplaceAll(text, s, Mark)
	}
	for _, rule := range rules {
		text = rule.pattern.ReplaceAllString(text, rule.with)
	}
	return text
}

// SecretName reports whether a value of this name may be secret.
func SecretName(name string) bool { return secretName.MatchString(name) }

// Environment returns the values of an environment, "NAME=VALUE" each, that may be secret.
func Environment(env []string) (secrets []string) {
	for _, line := range env {
		if name, value, ok := strings.Cut(line, "="); ok && SecretName(name) {
			secrets = append(secrets, value)
		}
	}
	return secrets
}

// Args returns a command line without secrets: a value is removed also if it is the
// argument after its flag.
func (r *Redactor) Args(args []string) []string {
	out := make([]string, len(args))
	hide := false
	for i, arg := range args {
		flag := strings.HasPrefix(arg, "-")
		switch {
		case hide && !flag:
			out[i] = Mark
		default:
			out[i] = r.Text(arg)
		}
		hide = flag && !strings.Contains(arg, "=") && SecretName(arg)
	}
	return out
}
