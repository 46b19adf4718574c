// Variables that another file has: here the assembler.
extern long total;
extern long own;
extern int nowhere;
extern const char words[];
static long unused;
static const void *__UNIQUE_ID_kept __attribute__((used)) = words;

int sums(int at)
{
	unused = at;
	return (int)(total + own) + nowhere + words[at];
}

__asm__(".data\n"
	".globl total\n.type total, %object\ntotal: .quad 5\n"
	".globl words\nwords: .asciz \"more\"\n"
	".section .data..percpu,\"aw\"\n"
	".globl own\n.type own, %object\nown: .quad 6\n"
	".text\n");
