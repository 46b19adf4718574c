; Generated from keys.c by `make runtime`.
; 73d1d45046359c5628da5a657857f36b54c2d734e2ce05c681774df6c1808e83
define internal i64 @key_kept(ptr %area, i64 %count, i64 %end, ptr %words, i64 %size) #0 {
entry:
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %entry ], [ %inc.i, %word_of.exit65 ]
  %hash.i.0 = phi i64 [ %size, %entry ], [ %xor1.i, %word_of.exit65 ]
  %add.i = add i64 %size, 7
  %div.i128 = lshr i64 %add.i, 3
  %cmp.i = icmp ult i64 %n.i.0, %div.i128
  br i1 %cmp.i, label %for.body.i, label %for.cond
for.body.i:
  %mul.i53 = shl i64 %n.i.0, 3
  %sub.i54 = sub i64 %size, %mul.i53
  %cmp.i55 = icmp ult i64 %sub.i54, 8
  br i1 %cmp.i55, label %cond.true.i59, label %cond.false.i56
cond.true.i59:
  %arrayidx.i60 = getelementptr inbounds i64, ptr %words, i64 %n.i.0
  %0 = load i64, ptr %arrayidx.i60, align 8
  %mul1.i61 = shl nuw nsw i64 %sub.i54, 3
  %notmask133 = shl nsw i64 -1, %mul1.i61
  %sub2.i63 = xor i64 %notmask133, -1
  %and.i64 = and i64 %0, %sub2.i63
  br label %word_of.exit65
cond.false.i56:
  %arrayidx3.i57 = getelementptr inbounds i64, ptr %words, i64 %n.i.0
  %1 = load i64, ptr %arrayidx3.i57, align 8
  br label %word_of.exit65
word_of.exit65:
  %cond.i58 = phi i64 [ %and.i64, %cond.true.i59 ], [ %1, %cond.false.i56 ]
  %xor.i = xor i64 %hash.i.0, %cond.i58
  %mul.i = mul i64 %xor.i, -7046029254386353131
  %shr.i = lshr i64 %mul.i, 32
  %xor1.i = xor i64 %mul.i, %shr.i
  %inc.i = add i64 %n.i.0, 1
  br label %for.cond.i
for.cond:
  %mine.0 = phi i64 [ %mine.1, %for.inc ], [ 0, %for.cond.i ]
  %n.0 = phi i64 [ %inc, %for.inc ], [ 0, %for.cond.i ]
  %cmp = icmp samesign ult i64 %n.0, 64
  br i1 %cmp, label %for.body, label %return
for.body:
  %places = getelementptr inbounds nuw i8, ptr %area, i64 8
  %add = add i64 %hash.i.0, %n.0
  %sub = add i64 %count, -1
  %and = and i64 %add, %sub
  %add.ptr = getelementptr inbounds i64, ptr %places, i64 %and
  %2 = load volatile i64, ptr %add.ptr, align 8
  %tobool.not = icmp eq i64 %2, 0
  br i1 %tobool.not, label %if.then, label %if.end12
if.then:
  %tobool3.not = icmp eq i64 %mine.0, 0
  br i1 %tobool3.not, label %if.then4, label %if.end
if.then4:
  %mul = shl i64 %count, 3
  %add5 = add i64 %mul, 8
  %add.i3 = add i64 %size, 7
  %div.i4129 = and i64 %add.i3, -8
  %add2.i = add i64 %div.i4129, 16
  %3 = atomicrmw add ptr %area, i64 %add2.i monotonic, align 8
  %add3.i = add i64 %add5, %3
  %add.ptr.i = getelementptr inbounds i8, ptr %area, i64 %add3.i
  %add4.i = add i64 %add3.i, %add2.i
  %cmp.i6 = icmp ugt i64 %add4.i, %end
  %conv.i = zext i1 %cmp.i6 to i64
  %expval.i = call i64 @llvm.expect.i64(i64 %conv.i, i64 0)
  %tobool.i.not = icmp eq i64 %expval.i, 0
  br i1 %tobool.i.not, label %if.end.i, label %if.then.i
if.then.i:
  %4 = atomicrmw sub ptr %area, i64 %add2.i monotonic, align 8
  br label %if.end
if.end.i:
  store volatile i64 %hash.i.0, ptr %add.ptr.i, align 8
  %size11.i = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 8
  store volatile i64 %size, ptr %size11.i, align 8
  br label %for.cond.i8
for.cond.i8:
  %n.i2.0 = phi i64 [ 0, %if.end.i ], [ %inc.i11, %word_of.exit48 ]
  %add13.i = add i64 %size, 7
  %div14.i130 = lshr i64 %add13.i, 3
  %cmp15.i = icmp ult i64 %n.i2.0, %div14.i130
  br i1 %cmp15.i, label %for.body.i9, label %if.end
for.body.i9:
  %mul.i36 = shl i64 %n.i2.0, 3
  %sub.i37 = sub i64 %size, %mul.i36
  %cmp.i38 = icmp ult i64 %sub.i37, 8
  br i1 %cmp.i38, label %cond.true.i42, label %cond.false.i39
cond.true.i42:
  %arrayidx.i43 = getelementptr inbounds i64, ptr %words, i64 %n.i2.0
  %5 = load i64, ptr %arrayidx.i43, align 8
  %mul1.i44 = shl nuw nsw i64 %sub.i37, 3
  %notmask = shl nsw i64 -1, %mul1.i44
  %sub2.i46 = xor i64 %notmask, -1
  %and.i47 = and i64 %5, %sub2.i46
  br label %word_of.exit48
cond.false.i39:
  %arrayidx3.i40 = getelementptr inbounds i64, ptr %words, i64 %n.i2.0
  %6 = load i64, ptr %arrayidx3.i40, align 8
  br label %word_of.exit48
word_of.exit48:
  %cond.i41 = phi i64 [ %and.i47, %cond.true.i42 ], [ %6, %cond.false.i39 ]
  %words18.i = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 16
  %arrayidx.i = getelementptr inbounds i64, ptr %words18.i, i64 %n.i2.0
  store volatile i64 %cond.i41, ptr %arrayidx.i, align 8
  %inc.i11 = add i64 %n.i2.0, 1
  br label %for.cond.i8
if.end:
  %mine.2 = phi i64 [ %mine.0, %if.then ], [ 0, %if.then.i ], [ %add3.i, %for.cond.i8 ]
  %tobool7.not = icmp eq i64 %mine.2, 0
  br i1 %tobool7.not, label %return, label %if.end9
if.end9:
  %7 = cmpxchg ptr %add.ptr, i64 %2, i64 %mine.2 seq_cst monotonic, align 8
  %8 = extractvalue { i64, i1 } %7, 1
  %9 = extractvalue { i64, i1 } %7, 0
  %spec.select = select i1 %8, i64 %2, i64 %9
  br i1 %8, label %return, label %if.end12
if.end12:
  %mine.1 = phi i64 [ %mine.0, %for.body ], [ %mine.2, %if.end9 ]
  %at.0 = phi i64 [ %2, %for.body ], [ %spec.select, %if.end9 ]
  %add.ptr13 = getelementptr inbounds i8, ptr %area, i64 %at.0
  %10 = load i64, ptr %add.ptr13, align 8
  %cmp.i16.not = icmp eq i64 %10, %hash.i.0
  br i1 %cmp.i16.not, label %lor.lhs.false.i, label %is_same.exit
lor.lhs.false.i:
  %size2.i = getelementptr inbounds nuw i8, ptr %add.ptr13, i64 8
  %11 = load i64, ptr %size2.i, align 8
  %cmp3.i.not = icmp eq i64 %11, %size
  br i1 %cmp3.i.not, label %for.cond.i18, label %is_same.exit
for.cond.i18:
  %n.i15.0 = phi i64 [ %inc.i25, %if.end8.i ], [ 0, %lor.lhs.false.i ]
  %add.i19 = add i64 %size, 7
  %div.i20131 = lshr i64 %add.i19, 3
  %cmp4.i = icmp ult i64 %n.i15.0, %div.i20131
  br i1 %cmp4.i, label %for.body.i22, label %is_same.exit
for.body.i22:
  %words5.i = getelementptr inbounds nuw i8, ptr %add.ptr13, i64 16
  %arrayidx.i23 = getelementptr inbounds i64, ptr %words5.i, i64 %n.i15.0
  %12 = load i64, ptr %arrayidx.i23, align 8
  %mul.i29 = shl i64 %n.i15.0, 3
  %sub.i = sub i64 %size, %mul.i29
  %cmp.i30 = icmp ult i64 %sub.i, 8
  br i1 %cmp.i30, label %cond.true.i, label %cond.false.i
cond.true.i:
  %arrayidx.i31 = getelementptr inbounds i64, ptr %words, i64 %n.i15.0
  %13 = load i64, ptr %arrayidx.i31, align 8
  %mul1.i = shl nuw nsw i64 %sub.i, 3
  %notmask132 = shl nsw i64 -1, %mul1.i
  %sub2.i = xor i64 %notmask132, -1
  %and.i = and i64 %13, %sub2.i
  br label %word_of.exit
cond.false.i:
  %arrayidx3.i = getelementptr inbounds i64, ptr %words, i64 %n.i15.0
  %14 = load i64, ptr %arrayidx3.i, align 8
  br label %word_of.exit
word_of.exit:
  %cond.i = phi i64 [ %and.i, %cond.true.i ], [ %14, %cond.false.i ]
  %cmp6.i.not = icmp eq i64 %12, %cond.i
  br i1 %cmp6.i.not, label %if.end8.i, label %is_same.exit
if.end8.i:
  %inc.i25 = add i64 %n.i15.0, 1
  br label %for.cond.i18
is_same.exit:
  %lnot16 = phi i1 [ false, %word_of.exit ], [ false, %if.end12 ], [ false, %lor.lhs.false.i ], [ true, %for.cond.i18 ]
  %conv = zext i1 %lnot16 to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool17.not = icmp eq i64 %expval, 0
  br i1 %tobool17.not, label %for.inc, label %return
for.inc:
  %inc = add nuw nsw i64 %n.0, 1
  br label %for.cond
return:
  %retval.0 = phi i64 [ %mine.2, %if.end9 ], [ 0, %if.end ], [ %at.0, %is_same.exit ], [ 0, %for.cond ]
  ret i64 %retval.0
}
